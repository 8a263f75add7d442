"""Ollama's door: `/api/chat`, `/api/generate` and their neighbours."""
