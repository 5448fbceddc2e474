"""What blocks do otherwise when they are computed a second time: attention is kept, and the last product left out."""
