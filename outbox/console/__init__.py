"""What both apps show to people: the pages of the admin, and what commands print.

It knows no model and no setting of either app; each app declares what is particular to it.
"""
