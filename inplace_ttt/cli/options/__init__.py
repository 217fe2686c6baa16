"""What each verb takes, apart from what it does: a --help, or a wrong argument, waits for no torch and no transformers."""
