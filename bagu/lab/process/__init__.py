"""Labs about process data: luck, recommendations, splits, signs, models. Plants whose truth is known decide."""
