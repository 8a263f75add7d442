"""`ssd chat`: talk with a model, on a terminal or line by line from a file."""

COMMANDS = {"chat": ("ssd.plugins.chat.chat:chat", "Talk with a model.")}
