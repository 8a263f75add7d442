"""Communication between processes: messages, sockets, the speculation board."""
