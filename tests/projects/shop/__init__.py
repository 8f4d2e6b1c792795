"""The app of these projects: one model, whose rows are the effects, and one handler."""
