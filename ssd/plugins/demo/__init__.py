"""`ssd demo`: what speculation gains over plain decoding, on a story, on an edit, and in other plugins' parts."""

COMMANDS = {"demo": ("ssd.plugins.demo.demo:demo", "See what speculation gains over plain decoding.")}
