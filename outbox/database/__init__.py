"""What both halves need of their databases: SQL that belongs to no model of theirs, and what errors and connections mean."""
