"""Define the plug-ins that users may write, and the inputs that plug-ins get."""
