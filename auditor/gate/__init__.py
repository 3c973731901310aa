"""Finished runs against limits and against each other; how many secrets a limit takes."""
