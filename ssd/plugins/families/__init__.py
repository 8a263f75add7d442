"""Rarer model families: Granite, OLMo 2 and OLMo 3."""
