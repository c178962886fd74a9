"""Questions about plans: is the word that a text ends on decided earlier, and can that be taken back?"""
