"""Providers of models, one file each: `--model NAME:REST` names one."""
