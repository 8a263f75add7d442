"""Quotas of API keys: `--limits`, requests and tokens a minute and requests at once."""
