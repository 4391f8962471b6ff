//! Vectors as stores keep them: directions, of length one.

/// Makes a vector of length one, and tells the length it had. The caller has checked that it is
/// made of finite numbers that are not all zero.
pub fn normalise(vector: &mut [f32]) -> f32 {
    // Scaled by the largest number first: squares of very large or small ones would not be finite.
    let largest = vector.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    if largest == 0.0 || !largest.is_finite() {
        return 0.0;
    }
    let square: f64 = vector
        .iter()
        .map(|x| f64::from(x / largest) * f64::from(x / largest))
        .sum();
    let length = square.sqrt();
    for x in vector.iter_mut() {
        *x = (f64::from(*x / largest) / length) as f32;
    }
    // A length beyond what can be told is the largest that can.
    ((length * f64::from(largest)) as f32).min(f32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn very_large_and_very_small_vectors_have_a_direction() {
        for scale in [1.0, 1e-30, 1e30, 1e-40] {
            let mut vector = [3.0 * scale, 4.0 * scale];
            let norm = normalise(&mut vector);
            assert!(
                (vector[0] - 0.6).abs() < 0.01 && (vector[1] - 0.8).abs() < 0.01,
                "{scale}"
            );
            assert!((norm / scale - 5.0).abs() < 0.1, "{scale}");
        }
    }
}
