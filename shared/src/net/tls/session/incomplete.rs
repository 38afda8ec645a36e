//! Ciphertext of an incomplete record.

/// Header of a record: content type, version, length (RFC 8446 §5.1).
const HEADER: usize = 5;
/// Most bytes that wait for more. Only a handshake message in several records has more than one
/// record.
const BYTES_MAX: usize = 64 * 1024;

/// Received bytes that wait for the rest of a record or of a handshake message.
#[derive(Default)]
pub(super) struct Incomplete {
    /// Complete records of an incomplete handshake message, changed by rustls, then the incomplete
    /// record.
    bytes: Vec<u8>,
    /// Where the incomplete record starts.
    record: usize,
}

impl Incomplete {
    /// Copies `rest`, in which the incomplete record starts at `record`.
    pub(super) fn new(rest: &[u8], record: usize) -> Self {
        Self {
            bytes: rest.to_vec(),
            record,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn is_too_long(&self) -> bool {
        self.bytes.len() > BYTES_MAX
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Appends the start of `input` up to the end of the header or of the record. Returns the
    /// number of bytes.
    pub(super) fn complete(&mut self, input: &[u8]) -> usize {
        let present = self.bytes.len() - self.record;
        let missing = record_length(&self.bytes[self.record..]).unwrap_or(HEADER) - present;
        let taken = missing.min(input.len());
        self.bytes.extend_from_slice(&input[..taken]);
        self.record += complete_records(&self.bytes[self.record..]);
        taken
    }

    /// Removes bytes at the start. Frees the memory with the last one.
    pub(super) fn discard(&mut self, count: usize) {
        if count >= self.bytes.len() {
            *self = Self::default();
            return;
        }
        self.bytes.drain(..count);
        self.record = self.record.saturating_sub(count);
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}

/// Length of the complete records at the start of `bytes`.
pub(super) fn complete_records(bytes: &[u8]) -> usize {
    let mut end = 0;
    while let Some(length) =
        record_length(&bytes[end..]).filter(|length| *length <= bytes.len() - end)
    {
        end += length;
    }
    end
}

/// Length of the record that starts with `bytes`; `None` if they are not a whole header.
fn record_length(bytes: &[u8]) -> Option<usize> {
    let header = bytes.first_chunk::<HEADER>()?;
    Some(HEADER + usize::from(u16::from_be_bytes([header[3], header[4]])))
}
