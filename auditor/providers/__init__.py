"""One file a provider of models: what `--model NAME:REST` may name."""
