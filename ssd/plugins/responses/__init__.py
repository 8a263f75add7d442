"""OpenAI's Responses door: `/v1/responses`, and the responses that are kept for later requests."""
