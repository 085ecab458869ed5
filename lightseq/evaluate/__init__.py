"""How far a model looks: loss by position, and needles in haystacks."""
