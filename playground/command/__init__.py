"""The two commands: what they accept, what they do, and looking at a variant or beginning one instead."""
