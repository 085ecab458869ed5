"""Makes the data a run trains on: synthetic tokens whose structure is known, or text through a tokenizer."""
