//! Encrypted, unsent records.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use rustls::unbuffered::EncryptError;

/// Least size of a chunk, so that small records share one.
const CHUNK_MIN: usize = 4 * 1024;
/// Most chunks of one system call.
const CHUNKS_AT_ONCE: usize = 32;

/// Records in the order of sending. Has no memory while empty.
#[derive(Default)]
pub(super) struct OutgoingRecords {
    /// Chunks of whole records. A full record has its own chunk, so no growth copies it.
    chunks: VecDeque<Vec<u8>>,
    /// Bytes of the first chunk that are sent.
    sent: usize,
    /// Unsent bytes of all chunks.
    unsent: usize,
}

impl OutgoingRecords {
    pub(super) fn len(&self) -> usize {
        self.unsent
    }

    pub(super) fn is_empty(&self) -> bool {
        self.unsent == 0
    }

    /// Appends what `write` writes, at first into room for `size` bytes, then for as many as it
    /// requires.
    pub(super) fn append(
        &mut self,
        mut size: usize,
        mut write: impl FnMut(&mut [u8]) -> Result<usize, EncryptError>,
    ) -> Result<(), rustls::Error> {
        loop {
            let chunk = self.chunk_with_room(size);
            let filled = chunk.len();
            chunk.resize(filled + size, 0);
            let result = write(&mut chunk[filled..]);
            let written = *result.as_ref().unwrap_or(&0);
            chunk.truncate(filled + written);
            self.unsent += written;
            self.free_if_empty();
            match result {
                Ok(_) => return Ok(()),
                Err(EncryptError::InsufficientSize(error)) if error.required_size > size => {
                    size = error.required_size;
                }
                Err(_) => return Err(rustls::Error::EncryptError),
            }
        }
    }

    /// Passes unsent bytes to `send`, and removes as many as it returns.
    pub(super) fn send_with(
        &mut self,
        send: impl FnOnce(&[IoSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut pieces = [IoSlice::new(&[]); CHUNKS_AT_ONCE];
        let mut from = self.sent;
        for (piece, chunk) in pieces.iter_mut().zip(&self.chunks) {
            *piece = IoSlice::new(&chunk[from..]);
            from = 0;
        }
        let sent = send(&pieces[..self.chunks.len().min(CHUNKS_AT_ONCE)])?;
        self.unsent = self.unsent.saturating_sub(sent);
        self.sent += sent;
        while let Some(first) = self.chunks.front().filter(|first| first.len() <= self.sent) {
            self.sent -= first.len();
            self.chunks.pop_front();
        }
        self.free_if_empty();
        Ok(())
    }

    fn chunk_with_room(&mut self, size: usize) -> &mut Vec<u8> {
        if self
            .chunks
            .back()
            .is_none_or(|last| last.capacity() - last.len() < size)
        {
            self.chunks.pop_back_if(|last| last.is_empty());
            self.chunks
                .push_back(Vec::with_capacity(size.max(CHUNK_MIN)));
        }
        let last = self.chunks.len() - 1;
        &mut self.chunks[last]
    }

    fn free_if_empty(&mut self) {
        if self.unsent == 0 {
            *self = Self::default();
        }
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.chunks.capacity() + self.chunks.iter().map(Vec::capacity).sum::<usize>()
    }
}
