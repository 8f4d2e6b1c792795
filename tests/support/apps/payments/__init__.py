"""The shop of the page "Effects outside the database": its example, word for word, and the two companies that it calls."""
