"""The model that a user gives, and the split of its layers into F, B and W."""
