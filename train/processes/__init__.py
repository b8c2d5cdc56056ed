"""Several processes: how they meet, agree and call each other, and who is missing."""
