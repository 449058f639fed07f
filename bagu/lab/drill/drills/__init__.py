"""One file per drill: texts in both languages, stub, hints, questions, bagu's own solution, planted wrong answers."""
