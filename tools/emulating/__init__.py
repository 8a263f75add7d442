"""The parts of tools/emulate.py."""
