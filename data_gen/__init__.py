"""Training data: synthetic tokens with a known structure, or tokenized text."""

# A wheel has this folder inside lightseq.
PROGRAM = "python3 -m data_gen" if __name__ == "data_gen" else "lightseq data"
