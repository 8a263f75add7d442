"""`ssd edge`: a frontend and a draft here, their target on another machine."""
