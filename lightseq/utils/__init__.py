"""Helpers for any package: text formatting, masking of secrets, versions, quiet imports."""
