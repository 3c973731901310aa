"""What is attacked: the built-in lab, users' files, LM-Extraction arrays, canaries; `plans/` holds the papers."""
