"""What an edit did to a picture, in numbers: colour, structure, blur, and how much of the edit is there. No torch."""
