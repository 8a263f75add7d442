"""What passes between processes: messages, sockets, the speculation board."""
