"""Views over events and records. Read-only: nothing here is imported by what it shows."""
