"""What an engine tells about itself while it runs: lanes of named states, and who reads them."""
