"""Images as people have them: what their headers say, how they reach their size, how they are decoded."""
