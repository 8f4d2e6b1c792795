"""The admin pages and the command output of both apps.

This package contains no model and no setting of either app; each app declares its own.
"""
