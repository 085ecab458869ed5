"""Loss by position, and retrieval of needles from haystacks."""
