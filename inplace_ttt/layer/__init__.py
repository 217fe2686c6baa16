"""The down-projection of a decoder layer as a fast weight, in one forward, in a stream, and across ranks."""
