"""Provide models, one file per provider: `--model NAME:REST` names a provider."""
