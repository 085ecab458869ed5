"""Helpers for any package: text formatting, progress bars, masking of secrets, versions, quiet imports."""
