"""The target process: it alone decides which tokens are committed."""
