"""Django apps and settings of the tests, and of the processes they start."""
