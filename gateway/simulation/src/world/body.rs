//! Bodies whose every byte says to which request and place it belongs.

/// The byte at `offset` of a body of request `id`. Uploads and downloads differ.
fn byte(id: u32, is_upload: bool, offset: usize) -> u8 {
    let mixed = (offset as u32)
        .wrapping_mul(0x9E37_79B1)
        .wrapping_add(id.wrapping_mul(0x85EB_CA6B))
        .wrapping_add(u32::from(is_upload));
    (mixed >> 24) as u8
}

/// `length` bytes from `offset` on.
pub(crate) fn bytes(id: u32, is_upload: bool, offset: usize, length: usize) -> Vec<u8> {
    (offset..offset + length)
        .map(|offset| byte(id, is_upload, offset))
        .collect()
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
    pub(crate) fn add(&mut self, id: u32, is_upload: bool, data: &[u8]) {
        let offset = self.length;
        self.is_foreign |= data
            .iter()
            .enumerate()
            .any(|(index, received)| *received != byte(id, is_upload, offset + index));
        self.length += data.len();
    }
}
