//! Heads of the audit log in the archive: the object `{region}/{day}/audit/{slot}-{hour}` has the
//! newest head that the node saw in that hour. Access to the database does not suffice to change
//! them.

use super::name::day_folder;
use super::uploader::Uploader;
use super::{Archive, ArchiveError};

/// Longest list of heads of one day: 24 of each node of the largest region.
const LISTED_MAX: usize = 24 * 1024;

/// Reads the newest head; `None` while there is none, or the store does not answer.
pub(super) type ReadHead = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// Head that an upload wrote last, with the name of its object.
pub(super) type WrittenHead = (String, String);

impl Archive {
    /// Also writes the head that `read` returns, in each upload. Has no effect if it was called
    /// before.
    pub fn keep_audit_heads(&self, read: impl Fn() -> Option<String> + Send + Sync + 'static) {
        // The first caller wins.
        let _ = self.audit_head.set(Box::new(read));
    }

    /// The heads that nodes have written on the days of the archive.
    pub fn audit_heads(&self) -> Result<Vec<String>, ArchiveError> {
        let mut heads = Vec::new();
        for day in self.now.each_day() {
            let folder = format!("{}/audit", day_folder(&self.region, day));
            for name in self.bucket.objects(&folder, LISTED_MAX)? {
                // It may have expired since it was listed.
                if let Some(sealed) = self.bucket.get(&name, None)? {
                    let head = self.opened(&name, 0, &sealed)?;
                    heads.push(String::from_utf8_lossy(&head).into_owned());
                }
            }
        }
        Ok(heads)
    }
}

impl Uploader {
    /// Writes the newest head of the audit log, unless its object has it.
    pub(super) fn write_audit_head(&mut self) -> Result<(), ArchiveError> {
        let Some(head) = self.archive.audit_head.get().and_then(|read| read()) else {
            return Ok(());
        };
        let (day, hour) = self.now.hour();
        let folder = day_folder(&self.archive.region, day);
        let name = format!("{folder}/audit/{:04}-{hour:02}", self.slot.get());
        let written = (name, head);
        if self.audit_head.as_ref() == Some(&written) {
            return Ok(());
        }
        let (name, head) = &written;
        let key = self.archive.sealing.object(name)?;
        let mut sealed = Vec::new();
        key.seal(0, head.as_bytes().to_vec(), &mut sealed)?;
        self.put(name, &sealed)?;
        self.audit_head = Some(written);
        Ok(())
    }
}
