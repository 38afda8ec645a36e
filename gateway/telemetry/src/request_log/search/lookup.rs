//! A record in a block, wherever the block is: in the file of a day or in an archived object.

use std::borrow::Cow;

use gw_shared::id::RequestId;
use http::Method;

use crate::request_log::block::{DecodedBlock, UnpackedBlock};
use crate::request_log::captures::capture::StoredMessage;
use crate::request_log::names::NamesNow;
use crate::request_log::record::RequestView;
use crate::request_log::view::CapturedView;
use crate::request_log::{CapturedRequest, LogError};

/// What rows of blocks refer to by number.
pub(crate) trait References {
    /// Returns the label of a service.
    fn label(&self, service: i64) -> Result<Cow<'_, str>, LogError>;

    /// Returns the heads of a captured request and its response.
    fn captured(&self, key: i64) -> Result<(Option<CapturedView>, Option<CapturedView>), LogError>;
}

/// Record found by its id.
pub(crate) struct Found {
    pub(crate) view: RequestView,
    /// Request target: path and query.
    target: String,
    /// Key of the captured messages.
    pub(crate) capture: Option<i64>,
}

impl Found {
    /// Finds the record with this id in a block. `None` if it is of an earlier account or service
    /// than those of `names`; without what was captured if they are deleted.
    pub(crate) fn in_block(
        block: &UnpackedBlock,
        id: RequestId,
        references: &impl References,
        names: &NamesNow,
    ) -> Result<Option<Self>, LogError> {
        let block = DecodedBlock::read(block, |_| true)?;
        let mut rows = block.rows.iter();
        let Some((service, row)) = rows.find(|(_, row)| block.id(row) == *id.as_bytes()) else {
            return Ok(None);
        };
        let label = references.label(*service)?;
        let Some(capture) = names.shown(&label, id.unix_ms(), row.capture) else {
            return Ok(None);
        };
        let mut view = block.columns(row, &label).view();
        add_captured(&mut view, capture, references)?;
        Ok(Some(Self {
            view,
            target: row.target.as_ref().to_owned(),
            capture,
        }))
    }

    /// Adds the captured request to the record.
    pub(crate) fn with_request(
        self,
        request: Option<StoredMessage>,
    ) -> Result<CapturedRequest, LogError> {
        let method = Method::from_bytes(self.view.method.as_bytes())
            .map_err(|_| LogError::Damaged("a method"))?;
        Ok(CapturedRequest {
            view: self.view,
            method,
            target: self.target,
            request: request.map(StoredMessage::unpack).transpose()?,
        })
    }
}

/// Adds the heads of the captured messages to the view of their record.
pub(crate) fn add_captured(
    view: &mut RequestView,
    capture: Option<i64>,
    references: &impl References,
) -> Result<(), LogError> {
    if let Some(key) = capture {
        (view.captured_request, view.captured_response) = references.captured(key)?;
    }
    Ok(())
}
