"""What the command line does, a file for each command: ``add`` says what it takes, ``run`` does it."""
