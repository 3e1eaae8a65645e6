"""Laws that hold across the rooms: of all values, of modules, of odd tensors and of halves."""
