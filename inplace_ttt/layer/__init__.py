"""A decoder layer's down-projection as a fast weight: in a forward, in a stream, across ranks."""
