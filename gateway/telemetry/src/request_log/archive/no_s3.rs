//! Stands for the bucket in a program without the feature `archive`. Its configuration refuses
//! `archive.url`, so that no value exists.

use std::convert::Infallible;
use std::ops::Range;
use std::time::Instant;

use gw_base::clock::Timestamp;

use super::{ArchiveError, ArchiveSettings};

#[derive(Clone)]
pub(super) struct S3Bucket(Infallible);

impl S3Bucket {
    pub(super) fn new(settings: &ArchiveSettings) -> Result<Self, ArchiveError> {
        let reason = "this program was built without the feature `archive`".to_owned();
        Err(ArchiveError::Store {
            action: "use",
            name: settings.place(),
            reason,
        })
    }

    pub(super) fn until(&self, _: Instant) -> Self {
        match self.0 {}
    }

    pub(super) fn put(&self, _: &str, _: &[u8]) -> Result<(), ArchiveError> {
        match self.0 {}
    }

    pub(super) fn get(
        &self,
        _: &str,
        _: Option<&Range<u64>>,
    ) -> Result<Option<Vec<u8>>, ArchiveError> {
        match self.0 {}
    }

    pub(super) fn written_at(&self, _: &str) -> Result<Option<Timestamp>, ArchiveError> {
        match self.0 {}
    }

    pub(super) fn delete(&self, _: &str) -> Result<(), ArchiveError> {
        match self.0 {}
    }

    pub(super) fn objects(&self, _: &str, _: usize) -> Result<Vec<String>, ArchiveError> {
        match self.0 {}
    }

    pub(super) fn folders(&self, _: &str) -> Result<Vec<String>, ArchiveError> {
        match self.0 {}
    }

    pub(super) fn place(&self) -> &str {
        match self.0 {}
    }
}
