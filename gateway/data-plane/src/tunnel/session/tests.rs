use super::*;

#[test]
fn frames_without_content_end_a_tunnel_beyond_their_rate() {
    let mut bucket = Bucket::new(limits::TUNNEL_CONTROL_FRAMES, Instant::now());
    let burst = limits::TUNNEL_CONTROL_FRAMES.burst();
    charge(&mut bucket, burst - 1).unwrap();
    charge(&mut bucket, 0).unwrap();
    // The rate refills by more than one frame only after several milliseconds.
    assert!(matches!(
        charge(&mut bucket, burst),
        Err(TunnelError::Flood)
    ));
}
