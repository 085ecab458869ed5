"""Helpers that any package may use: text formatting, masking of secrets, versions, quiet imports."""
