"""What a user hands over, and what one layer becomes: F, B and W."""
