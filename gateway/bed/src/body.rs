//! Bodies whose every byte says to which request and place it belongs.

use std::cell::OnceCell;

/// Bytes of the pattern. A prime number, so that no size of buffers divides it.
const PERIOD: usize = 65_521;
/// Longest piece that is compared or made at once.
const PIECE: usize = 64 * 1024;
/// Distance of the beginnings of two bodies in the pattern.
const STEP: usize = 7_919;

thread_local! {
    /// Pattern from which all bodies are cut.
    static PATTERN: OnceCell<Vec<u8>> = const { OnceCell::new() };
}

/// Passes the bytes of a body of request `id` from `offset` on to `call`. Uploads and downloads
/// differ.
fn with<R>(
    id: u32,
    is_upload: bool,
    offset: usize,
    length: usize,
    call: impl FnOnce(&[u8]) -> R,
) -> R {
    let start = (id as usize * 2 + usize::from(is_upload)) * STEP + offset;
    let start = start % PERIOD;
    PATTERN.with(|pattern| {
        let pattern = pattern.get_or_init(|| {
            let mut state = 1_u64;
            let random = |_| {
                // A linear congruential generator, of which the highest bits are the best.
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (state >> 56) as u8
            };
            let period: Vec<u8> = (0..PERIOD).map(random).collect();
            period
                .iter()
                .copied()
                .cycle()
                .take(PERIOD + PIECE)
                .collect()
        });
        call(&pattern[start..start + length])
    })
}

/// `length` bytes from `offset` on, at most 64 KiB.
pub fn bytes(id: u32, is_upload: bool, offset: usize, length: usize) -> Vec<u8> {
    with(id, is_upload, offset, length, <[u8]>::to_vec)
}

/// A body that arrives.
#[derive(Debug, Clone, Copy, Default)]
pub struct Received {
    /// Bytes so far.
    pub length: usize,
    /// A byte was not that of the body at its place.
    pub is_foreign: bool,
}

impl Received {
    /// Takes the next bytes.
    pub fn add(&mut self, id: u32, is_upload: bool, data: &[u8]) {
        for piece in data.chunks(PIECE) {
            let is_own = with(id, is_upload, self.length, piece.len(), |body| {
                body == piece
            });
            self.is_foreign |= !is_own;
            self.length += piece.len();
        }
    }
}
