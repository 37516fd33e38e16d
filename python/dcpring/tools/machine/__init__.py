"""What a machine and its storage can do: ``doctor`` tries it out, ``bench`` measures it."""
